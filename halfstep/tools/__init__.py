"""Questions: each tool is a function `run(...)` that returns a frozen result; none imports a framework."""
