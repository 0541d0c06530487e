"""The proof of guarantee "transaction": whatever dies, stalls or runs twice, a record has its effects once."""
