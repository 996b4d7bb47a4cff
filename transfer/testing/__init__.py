"""What tests need, ours and those of engines that use this package: faults, twins, suites of conformance, oracles.

Nothing in the product imports this package. Start at:

* `faults`: links and copiers that fail on purpose by a plan with a seed, and a clock that steps;
* `link`, `copier`, `carrier`: suites of conformance that a new link, copier or carrier has to pass;
* `simulator`, `scale`: whole instances in one thread on a stepped clock, judged byte by byte by `oracle`;
* `fuzz`: what no peer may bring about, whatever it sends.
"""
