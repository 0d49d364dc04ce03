"""What each module of a model becomes under a policy: the plan, and the classes that carry it out."""
