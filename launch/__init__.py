"""One run file for all roles: configuration, command line, supervisor. Holds no logic of a role."""
