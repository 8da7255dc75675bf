"""Basic values: quantities, texts for people, and the error for bad input.

Comes in: a text or a number of JSON. Goes out: MiB and percent, `InvalidRequest` with field and remedy, `Refusal`.

    quantity  quantities of Kubernetes
    amounts   quantities as people write them in our own objects
    refusals  why a node takes no pod: the closed set of texts
    invalid   the error for bad input
    wording   numbers and lists in a sentence
    objectnames  what the API server takes for names of objects
    shellcommand  commands that people are advised to run, with names and quoted texts in them
    decoded   the type of decoded JSON
"""
