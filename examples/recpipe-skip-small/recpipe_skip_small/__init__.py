"""A recpipe plugin that leaves small gradients out."""
