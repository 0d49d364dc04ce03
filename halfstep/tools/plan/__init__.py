"""`halfstep plan`: memory, traffic, time and money of a training, before a GPU is rented."""
