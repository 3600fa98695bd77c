// How Python calls a compiled function (build.Function): with an array of 64-bit numbers, which are
// integers, addresses, or the bits of doubles.

#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// One argument in the type A that the function declares.
template <typename A> static A as(int64_t arguments) {
    if constexpr (std::is_floating_point_v<A>) {
        double number;
        memcpy(&number, &arguments, sizeof number);
        return number;
    } else return (A)arguments;
}

// Calls f with the arguments that it declares. Returns its result, or 1 if it has none.
template <typename R, typename... A, size_t... i>
static int64_t spread(R (*f)(A...), const int64_t *arguments, std::index_sequence<i...>) {
    if constexpr (std::is_void_v<R>) return f(as<A>(arguments[i])...), 1;
    else return f(as<A>(arguments[i])...);
}

template <typename R, typename... A> static int64_t spread(R (*f)(A...), const int64_t *arguments) {
    return spread(f, arguments, std::index_sequence_for<A...>());
}

// Defines call_NAME, by which Python calls a function. build.py reads the names from these lines.
#define CALLED(name, ...) \
    extern "C" int64_t call_##name(const int64_t *arguments) { return spread(__VA_ARGS__, arguments); }
