"""Plans: a mask compiled for its lengths, ready to run; dynamic plans are rebuilt on the GPU."""
