"""The parts that both Triton engines share: the arithmetic of a tile, launches, tile sizes.

`triton` and `csgmv` differ in how a plan cuts a batch and in their entry kernels; everything below
that is here, once.
"""
