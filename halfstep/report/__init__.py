"""Turns a run's events into one HTML page that needs nothing else: no network, no framework, no tensor.

`page.render` makes the page from events and `page.write` puts it next to them. `history` keeps the events that
count, `step_history` their numbers, `incidents` what happened besides steps. `summary`, `precision`, `charts`,
`time_breakdown` and `settings` say what the sections show, `number_format` and `series` how numbers and long lines
are shown, and `template` fills templates/page.html with it.
"""
