"""Every cross-entropy: of plain logits, of an fp8 head, and with logits that become codes."""
