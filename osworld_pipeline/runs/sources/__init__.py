"""Raw sources and the union tables made of them."""
