"""OSGym's endpoints, action language and workers."""
