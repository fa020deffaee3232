"""Plans for masks that a model makes at run time: lists of fixed size, refilled on the GPU in every step."""
