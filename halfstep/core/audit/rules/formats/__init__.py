"""HS4xx: the formats that operations and buffers have."""
