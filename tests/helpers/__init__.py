"""What tests share: small layers and models, engines, deltas, plug-ins of pytest."""
