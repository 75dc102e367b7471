"""A Flower App: digits on nodes, some of which fail when they are told to."""
