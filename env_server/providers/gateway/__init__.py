"""Remote desktops: sandboxes behind a gateway, used through a client of your own or through the reference client for
plain HTTPS. A client of your own uses the classes of `client`."""
