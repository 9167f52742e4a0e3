"""Training's operations as one pass over memory each, where Paddle's CPU wheel has several: built here, from C++."""
