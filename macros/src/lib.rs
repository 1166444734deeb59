//! The `#[profiled]` attribute of `tracing-profiling`, which re-exports and documents it.

#![forbid(unsafe_code)]

mod awaits;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    Attribute, Error, Expr, Ident, LitStr, Path, ReturnType, Signature, Token, Type, Visibility,
    parenthesized, parse_quote,
};

/// See `tracing_profiling::profiled`.
#[proc_macro_attribute]
pub fn profiled(
    arguments: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    expand(arguments.into(), item.into()).into()
}

/// Expands to `tracing::instrument`, with the settings in the name of a field that never has a value. They are
/// then part of the callsite's metadata, where the layer reads them once and other layers see no value.
fn expand(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let checked = syn::parse2::<Arguments>(arguments)
        .and_then(|arguments| Ok((arguments, syn::parse2::<Function>(item.clone())?)));
    match checked {
        Ok((arguments, function)) => {
            let Arguments { settings, fields, others, has_err, krate } = arguments;
            let krate = krate.unwrap_or_else(|| parse_quote!(::tracing_profiling));
            let item = match settings.off {
                true => item,
                false => awaits::wrap(item, function.is_async, &function.output, &krate),
            };
            let needs_err = settings.on_error && function.returns_result && !has_err;
            let item = if needs_err { warn_of_missing_err(item) } else { item };
            let marker = settings.marker().map(|name| quote!({#name} = ::tracing::field::Empty));
            let fields = fields.iter().flatten().cloned().chain(marker);
            let fields = quote!(fields(#(#fields),*));
            quote! {
                #[::tracing::instrument(#(#others,)* #fields)]
                #item
            }
        }
        Err(error) => {
            // Keeps the function, so that its uses cause no further errors.
            let error = error.to_compile_error();
            quote!(#error #item)
        }
    }
}

/// Adds to the function's body what makes the compiler warn. Macros can emit no warnings themselves.
fn warn_of_missing_err(item: TokenStream) -> TokenStream {
    let mut tokens: Vec<_> = item.into_iter().collect();
    let Some(TokenTree::Group(body)) = tokens.pop() else {
        return tokens.into_iter().collect();
    };
    let statements = body.stream();
    let statements = match awaits::has_inner_attributes(&statements) {
        // Inner attributes must come first.
        true => statements,
        false => quote! {
            const _: () = {
                #[deprecated(note = "`on_error` does not keep a function that returns `Err` without `err`, which \
                    records the error: write `#[profiled(on_error, err)]`")]
                const ON_ERROR_WITHOUT_ERR: () = ();
                ON_ERROR_WITHOUT_ERR
            };
            #statements
        },
    };
    let mut body_with_warning = Group::new(Delimiter::Brace, statements);
    body_with_warning.set_span(body.span());
    tokens.push(TokenTree::Group(body_with_warning));
    tokens.into_iter().collect()
}

/// The settings of `#[profiled]` that `instrument` does not have.
#[derive(Default)]
struct Settings {
    threshold_ns: Option<u64>,
    on_error: bool,
    off: bool,
}

impl Settings {
    /// The field name, in the format that `keep::candidates` of `tracing-profiling` parses.
    fn marker(&self) -> Option<String> {
        let threshold = self.threshold_ns.map(|ns| format!("threshold_ns={ns}"));
        let on_error = self.on_error.then(|| "on_error".to_owned());
        let off = self.off.then(|| "off".to_owned());
        let words: Vec<_> = [threshold, on_error, off].into_iter().flatten().collect();
        (!words.is_empty()).then(|| format!("tracing_profiling {}", words.join(" ")))
    }
}

/// The arguments of the attribute.
#[derive(Default)]
struct Arguments {
    settings: Settings,
    /// The content of `fields(...)`, if present.
    fields: Option<Vec<TokenStream>>,
    /// All other arguments of `instrument`.
    others: Vec<TokenStream>,
    /// Whether `err` is among them.
    has_err: bool,
    /// The path of `tracing_profiling`, if it has another name.
    krate: Option<Path>,
}

/// The arguments of `instrument` in tracing 0.1, which only warns about others.
const FOR_INSTRUMENT: [&str; 9] =
    ["name", "target", "parent", "follows_from", "level", "skip", "skip_all", "err", "ret"];
const EXPECTED: &str = "unknown argument: expected `threshold`, `on_error`, `off` or `crate`, or an \
    argument of `tracing::instrument`";

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut arguments = Self::default();
        let mut off = None;
        while !input.is_empty() {
            if input.peek(LitStr) {
                arguments.others.push(input.parse::<LitStr>()?.into_token_stream());
            } else {
                // `crate` is a keyword.
                let name =
                    Ident::parse_any(input).map_err(|error| Error::new(error.span(), EXPECTED))?;
                arguments.parse_named(&name, input)?;
                if name == "off" {
                    off = Some(name);
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let Settings { threshold_ns, on_error, .. } = arguments.settings;
        match off {
            Some(off) if threshold_ns.is_some() || on_error => Err(Error::new(
                off.span(),
                "`off` cannot be combined with `threshold` or `on_error`",
            )),
            _ => Ok(arguments),
        }
    }
}

impl Arguments {
    fn parse_named(&mut self, name: &Ident, input: ParseStream<'_>) -> syn::Result<()> {
        let settings = &mut self.settings;
        let once = |is_first: bool| match is_first {
            true => Ok(()),
            false => Err(Error::new(name.span(), format!("duplicate argument `{name}`"))),
        };
        match name.to_string().as_str() {
            "threshold" => {
                once(settings.threshold_ns.is_none())?;
                input.parse::<Token![=]>()?;
                settings.threshold_ns = Some(threshold(input)?);
            }
            "on_error" => {
                once(!settings.on_error)?;
                settings.on_error = true;
            }
            "off" => {
                once(!settings.off)?;
                settings.off = true;
            }
            "crate" => {
                once(self.krate.is_none())?;
                input.parse::<Token![=]>()?;
                self.krate = Some(match input.peek(LitStr) {
                    true => input.parse::<LitStr>()?.parse()?,
                    false => input.parse()?,
                });
            }
            "fields" => {
                once(self.fields.is_none())?;
                let content;
                parenthesized!(content in input);
                let fields = Punctuated::<Field, Token![,]>::parse_terminated(&content)?;
                self.fields = Some(fields.into_iter().map(|field| field.0).collect());
            }
            known if FOR_INSTRUMENT.contains(&known) => {
                self.has_err |= known == "err";
                self.others.push(for_instrument(name, input)?);
            }
            _ => return Err(Error::new(name.span(), EXPECTED)),
        }
        Ok(())
    }
}

/// `name`, `name = EXPRESSION` or `name(...)`, to be parsed by `instrument`.
fn for_instrument(name: &Ident, input: ParseStream<'_>) -> syn::Result<TokenStream> {
    if input.peek(Token![=]) {
        let equals: Token![=] = input.parse()?;
        let value: Expr = input.parse()?;
        return Ok(quote!(#name #equals #value));
    }
    if input.peek(syn::token::Paren) {
        let content;
        let parentheses = parenthesized!(content in input);
        let content: TokenStream = content.parse()?;
        let mut tokens = name.to_token_stream();
        parentheses.surround(&mut tokens, |tokens| tokens.extend(content));
        return Ok(tokens);
    }
    Ok(name.to_token_stream())
}

/// One field of `fields(...)`, up to the next comma. Expressions may contain commas inside `<...>`.
struct Field(TokenStream);

impl Parse for Field {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut tokens = TokenStream::new();
        while !input.is_empty() && !input.peek(Token![,]) {
            if input.peek(Token![=]) {
                tokens.extend(input.parse::<Token![=]>()?.into_token_stream());
                for sigil in [input.peek(Token![%]), input.peek(Token![?])] {
                    if sigil {
                        tokens.extend(input.parse::<TokenTree>()?.into_token_stream());
                    }
                }
                tokens.extend(input.parse::<Expr>()?.into_token_stream());
            } else {
                tokens.extend(input.parse::<TokenTree>()?.into_token_stream());
            }
        }
        Ok(Self(tokens))
    }
}

fn threshold(input: ParseStream<'_>) -> syn::Result<u64> {
    const FORM: &str = "expected a duration in quotes, such as \"50ms\"";
    let literal: LitStr = input.parse().map_err(|error| Error::new(error.span(), FORM))?;
    let duration = humantime::parse_duration(&literal.value())
        .map_err(|error| Error::new(literal.span(), format!("{FORM}: {error}")))?;
    u64::try_from(duration.as_nanos())
        .map_err(|_| Error::new(literal.span(), "the threshold must be shorter than 584 years"))
}

/// The annotated item, parsed as far as needed here.
struct Function {
    is_async: bool,
    output: ReturnType,
    returns_result: bool,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        const FORM: &str = "#[profiled] can only be applied to a function";
        let outside = |error: Error| Error::new(error.span(), FORM);
        input.call(Attribute::parse_outer)?;
        input.parse::<Visibility>()?;
        if input.peek(Ident) && input.fork().parse::<Ident>()? == "default" {
            input.parse::<Ident>()?;
        }
        let signature: Signature = input.parse().map_err(outside)?;
        if let Some(keyword) = signature.constness {
            return Err(Error::new(
                keyword.span(),
                "a `const fn` may be evaluated at compile time, without spans: remove `const` or \
                 #[profiled]",
            ));
        }
        if !input.peek(syn::token::Brace) {
            return Err(Error::new(
                signature.span(),
                "#[profiled] needs a function with a body: apply it to the implementation",
            ));
        }
        input.parse::<TokenStream>()?;
        let returns_result = match &signature.output {
            ReturnType::Type(_, returned) => match &**returned {
                Type::Path(path) => {
                    path.path.segments.last().is_some_and(|last| last.ident == "Result")
                }
                _ => false,
            },
            ReturnType::Default => false,
        };
        let is_async = signature.asyncness.is_some();
        Ok(Self { is_async, output: signature.output, returns_result })
    }
}
