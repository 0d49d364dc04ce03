"""One module per rule, in folders by the first digit of its id; `halfstep.core.audit.engine` finds them."""
