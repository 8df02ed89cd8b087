"""Other ways to hand a tensor to a model, behind the same HTTP surface."""
