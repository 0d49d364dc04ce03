"""A run's events to one HTML page that needs nothing else: no network, no framework, no tensor.

`page.render` makes the page from events and `page.write` puts it beside them. On the way, `history` says what
of the events counts, `figures` how numbers are told, `series` what a chart shows of a long run, `charts`,
`happenings`, `summary`, `precision`, `spending` and `tables` make the parts, and `markup` escapes all that is not
ours.
"""
