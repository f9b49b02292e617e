"""Devices, paths, names of variables and checks of tensors, for every part of the package."""
