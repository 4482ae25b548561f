"""The agent inside a desktop: OSWorld's guest protocol, with only the system's Python and Debian packages.

In the guest this folder is the package `osworld_guest`, so its modules import each other relatively and no other part
of the project.
"""
