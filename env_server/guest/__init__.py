"""The agent inside a desktop: OSWorld's guest protocol with the system's Python and Debian packages only.

In the guest this folder is the package `osworld_guest`, so its modules import each other relatively and nothing else
of the project.
"""
