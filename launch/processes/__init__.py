"""Child processes that die with their parent, and what the kernel says of them.

- `child`: starts and stops them. `role_command`: command line and environment of a role.
- `kernel`: cores, memory, and the living descendants of a process.
- `ports`: TCP ports that nothing listens on.
"""
