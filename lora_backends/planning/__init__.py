"""How many adapters fit on how many cards, and how long their requests wait: `lora-backends plan`.

`shapes` asks a model's configuration for bytes, `cards` a card's measurements for times, `traffic`
draws requests, `simulation` runs them through the pool's own policy, and `fleet` compares numbers
of slots and cards. The time is virtual: nothing sleeps, and a seed decides every draw.
"""
