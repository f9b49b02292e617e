"""What the engines written in Triton share: launches, copies of plans, rounding."""
