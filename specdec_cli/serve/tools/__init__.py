"""Tool calls: the formats that models write, read while they stream, and enforced when strict."""
