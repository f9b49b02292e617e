"""The hooks at linear layers, experts and routers, and the weights that they join."""
