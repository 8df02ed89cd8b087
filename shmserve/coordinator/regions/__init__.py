"""Client memory: registering it, handing it out, letting it go."""
