"""Code that numba compiles: the shared-out loop over segments, and the routines that it calls."""
