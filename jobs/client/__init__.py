"""Submit jobs, follow and steer them, ask for answers: the Python face, and what the command line is made of."""
