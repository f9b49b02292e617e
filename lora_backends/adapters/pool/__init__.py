"""The slots on a device, the stacks behind them, and the store of adapters without a slot."""
