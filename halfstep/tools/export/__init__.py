"""`halfstep export`: a trained model in the files of other libraries, loaded back and scored before it is kept."""
