"""HS1xx: masters, moments, and updates that never arrive."""
