"""Judge a model before it is deployed: every method against the exact cache, from one run.

inputs    documents, induction rows and recall questions from files
units     what is run on one document, and what is measured
run       all methods on all units, resumable
results   per-document figures -> the ``results`` list
windows   quality and memory against the window sizes
verify    is an artifact's recorded error reproduced
"""
