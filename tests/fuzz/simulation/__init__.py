"""A simulation from one seed: threads, files and failures of pool and store, or of requests.

As FoundationDB's simulation and TigerBeetle's VOPR do, it runs the real code, draws every order of
events from one seed, and repeats a failure from that seed.
"""
