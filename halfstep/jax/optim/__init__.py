"""AdamW and Muon as optax transforms, and how masters and moments are held around any transform."""
