//! Wraps the bodies of async functions in `ProfiledExt::profiled`.

use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Path, ReturnType};

/// Wraps the body of a function, if it is async or returns `Box::pin(async move { ... })`, as `async-trait` writes it.
pub(crate) fn wrap(
    item: TokenStream,
    is_async: bool,
    output: &ReturnType,
    krate: &Path,
) -> TokenStream {
    with_body(item, |body| match is_async {
        true => {
            let typed = (!has_inner_attributes(&body)).then(|| typed(output));
            Some(profiled(&quote!(#typed #body), krate))
        }
        false => in_boxed(body, krate),
    })
}

/// A function whose body `change` may replace.
pub(crate) fn with_body(
    item: TokenStream,
    change: impl FnOnce(TokenStream) -> Option<TokenStream>,
) -> TokenStream {
    let mut tokens: Vec<_> = item.into_iter().collect();
    if let Some(TokenTree::Group(body)) = tokens.last_mut()
        && let Some(stream) = change(body.stream())
    {
        *body = with_span_of(body, stream);
    }
    tokens.into_iter().collect()
}

fn with_span_of(group: &Group, stream: TokenStream) -> Group {
    let mut new = Group::new(group.delimiter(), stream);
    new.set_span(group.span());
    new
}

fn profiled(body: &TokenStream, krate: &Path) -> TokenStream {
    quote!(#krate::ProfiledExt::profiled(async move { #body }).await)
}

/// The content of a body whose last expression is `Box::pin(async move { ... })`, with that block wrapped.
fn in_boxed(body: TokenStream, krate: &Path) -> Option<TokenStream> {
    let mut tokens: Vec<_> = body.into_iter().collect();
    let [.., TokenTree::Ident(pin), TokenTree::Group(arguments)] = tokens.as_mut_slice() else {
        return None;
    };
    let mut inner: Vec<_> = arguments.stream().into_iter().collect();
    let Some((TokenTree::Group(block), words)) = inner.split_last_mut() else { return None };
    let words: Vec<_> = words.iter().map(ToString::to_string).collect();
    let is_pin = pin == "pin" && arguments.delimiter() == Delimiter::Parenthesis;
    if !is_pin || words != ["async", "move"] || block.delimiter() != Delimiter::Brace {
        return None;
    }
    *block = with_span_of(block, profiled(&block.stream(), krate));
    *arguments = with_span_of(arguments, inner.into_iter().collect());
    Some(tokens.into_iter().collect())
}

pub(crate) fn has_inner_attributes(body: &TokenStream) -> bool {
    let mut first = body.clone().into_iter();
    let is = |token: Option<TokenTree>, sign: char| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    is(first.next(), '#') && is(first.next(), '!')
}

/// A statement that makes the type of the block known, which is needed for `?`. It has no effect.
fn typed(output: &ReturnType) -> TokenStream {
    let output = match output {
        ReturnType::Default => quote!(()),
        ReturnType::Type(_, output) => without_impl(output.to_token_stream()),
    };
    quote! {
        #[allow(
            unreachable_code, clippy::diverging_sub_expression, clippy::empty_loop,
            clippy::let_unit_value, clippy::let_with_type_underscore, clippy::needless_return,
            clippy::unreachable
        )]
        if false {
            let __tracing_profiling_returned: #output = loop {};
            return __tracing_profiling_returned;
        }
    }
}

/// A type with `_` for each `impl Trait`.
fn without_impl(output: TokenStream) -> TokenStream {
    let mut without = TokenStream::new();
    // The nesting of `<...>` inside of an `impl Trait` that is left out.
    let mut depth: Option<usize> = None;
    let mut before = ' ';
    for token in output {
        let sign = if let TokenTree::Punct(punct) = &token { punct.as_char() } else { ' ' };
        let is_arrow = before == '-' && sign == '>';
        before = sign;
        match (&mut depth, sign) {
            (Some(0), ',' | '>') if !is_arrow => depth = None,
            (Some(nested), '<') => *nested += 1,
            (Some(nested), '>') if !is_arrow => *nested -= 1,
            _ => {}
        }
        if depth.is_some() {
            continue;
        }
        match token {
            TokenTree::Ident(name) if name == "impl" => {
                depth = Some(0);
                without.extend([TokenTree::Ident(Ident::new("_", name.span()))]);
            }
            TokenTree::Group(group) => {
                let group = with_span_of(&group, without_impl(group.stream()));
                without.extend([TokenTree::Group(group)]);
            }
            other => without.extend([other]),
        }
    }
    without
}
