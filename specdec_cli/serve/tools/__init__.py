"""Tool calls: the formats that models write, read while they stream, enforced if strict."""
