"""The running desktops of all env servers as live pictures. The viewer asks the servers and sends their pictures on, so
a browser needs no connection to them and no token. It only reads: no input reaches a desktop through it."""
