"""What looks at a run: audit, monitor, shadow, planning and tuning. The engine never imports it."""
