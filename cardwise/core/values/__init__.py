"""Basic values: quantities, texts for users, and the error for invalid input.

Input: a JSON string or number. Output: MiB and percent, `InvalidRequest` with field and remedy, `Refusal`.

    quantity      quantities of Kubernetes
    timestamps    times of the Kubernetes API
    amounts       quantities as users write them in Cardwise's custom resources
    refusals      why a node does not take a pod: the fixed set of reasons
    invalid       the error for invalid input
    wording       numbers, lists and quotations in a sentence
    objectnames   the API server's rules for names of objects
    shellcommand  commands in remedies, with names and quoted texts in them
    decoded       the type of decoded JSON
"""
