"""How an episode operates its desktop: the interface of drivers, and the driver of desktops with a guest agent."""
