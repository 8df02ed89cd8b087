"""GRPS projects in the model repository: what their files say, and where their instances run."""
