"""The slots on a device, their stacks, and the store of adapters without a slot."""
