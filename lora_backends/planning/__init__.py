"""`lora-backends plan`: adapters that fit on a card, waits of requests, and cards for a load.

`shapes` derives bytes from a model's configuration, `cards` derives times from benchmark results,
`traffic` draws requests, `simulation` serves them under the adapter pool's own policy, and `fleet`
compares numbers of slots and of cards. Time is virtual: nothing sleeps. All draws are seeded.
"""
