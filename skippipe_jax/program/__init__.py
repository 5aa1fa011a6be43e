"""Plans to programs: what each host does in an iteration, and which plan an iteration takes."""
