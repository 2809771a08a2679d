"""Slipstream (Maboud et al., 2024): inputs whose popular rows have stopped changing are left out."""
