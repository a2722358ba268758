"""Grids of cells: each measured on its own, on this machine or on many, and kept."""
