"""Upper bounds of sizes in a recipe, so that a wrong digit is an error before memory is allocated."""

# No real run reaches them: the deepest published transformers have about 1,000 layers, Llama 3 405B is 16,384 wide.
MAX_LAYERS = 10_000
MAX_WIDTH = 1_000_000
MAX_SEQUENCE = 100_000_000
MAX_PROCESSES = 1_000_000
MAX_TOKENS = 10**18
MAX_BATCH_TOKENS = 10**12
MAX_RAMP_STEPS = 10_000
MAX_EXPERTS = 100_000
