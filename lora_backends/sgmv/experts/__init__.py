"""Experts on the Triton engines: routing on the device, and two launches a site."""
