"""``task=characterize``: what a step's operators do, how long they take, and what bounds them."""
